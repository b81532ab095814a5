"""From a step to the driver: devices, contexts, Triton's versions, scratch, launches that are kept.

The folder imports only strides.py from the rest of this package, so it knows nothing of attention.
A new backend is a line in platform.py and, if its launches are kept, a file beside driver.py.
"""
