"""Other projects' own tests over this library.  Each needs a checkout of its project: make test-suites SUITE=path."""
