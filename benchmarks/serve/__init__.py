"""An engine with a model of real size replays a trace, over this library and over other attention backends.

`python -m benchmarks serve` and `paged-attn bench serve` are `command.main`.  The structure is that of
examples/tiny_engine.py, with what speed needs: inputs kept on the device, CUDA graphs, steps in flight.
"""
