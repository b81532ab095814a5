"""Hopper kernels on a CPU: the PTX that Triton makes of them, executed by a program of ours (`machine.cpp`).

The interpreter runs the portable kernels; Gluon's have none, for they are made of what it does not know: warps with
tasks of their own, barriers, the copy engine, the tensor cores, assembly.  Here all of it is done as the PTX says, in
each launch with other turns among warps and other times at which copies arrive.
"""

import os
import shutil

SIMULATES = os.environ.get("SIMULATE") == "1"
COMPILER = shutil.which("g++")
if SIMULATES:  # before anybody imports the package
    os.environ["TRITON_INTERPRET"] = "0"
