"""Which dialect takes a call, and the steps of its plan."""
