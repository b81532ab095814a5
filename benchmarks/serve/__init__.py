"""An engine with a model of real size, which replays a trace over this library and over other attention backends.

`python -m benchmarks serve` and `paged-attn bench serve` call `command.main`.  The engine is built like
examples/tiny_engine.py, and adds what speed needs: inputs kept on the device, CUDA graphs, steps in flight.
"""
