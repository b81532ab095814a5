"""An engine with a real-size model replays a trace: the same engine over this library and over what others use.

`python -m benchmarks serve` and `paged-attn bench serve` are `command.main`.  The structure is that of
examples/tiny_engine.py; what is added is what speed needs: inputs kept on the device, CUDA graphs, steps in flight.
"""
