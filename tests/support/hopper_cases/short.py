"""Batches over a few hundred keys for tests of features, one for each way in which blocks are made of rows."""

from __future__ import annotations

from tests.support.hopper_cases.parts import ragged

DECODES = ragged((1, 500), (1, 700), (1, 1), (1, 0), (1, 300)) | dict(decode_form=True)
OF_8 = ragged((8, 190), (8, 600), (5, 132), (8, 8), (0, 77)) | dict(bounds=True)
OF_32 = ragged((32, 240), (32, 456), (20, 132), (32, 32)) | dict(bounds=True)
_ALL_SORTS = ((1, 500), (40, 230), (150, 150), (64, 300), (1, 1), (17, 33), (1, 0), (2, 130))
MIXED = ragged(*_ALL_SORTS, (40, 9))
MIXED_WITH_CHUNK = ragged(*_ALL_SORTS, (90, 700), (40, 9))
BESIDE = ragged((200, 900), *[(1 + 3 * (i % 2), 64 + 37 * i) for i in range(20)], (70, 90)) | dict(bounds=True)
LONG = ragged((300, 500), (300, 300), (300, 430)) | dict(bounds=True)
