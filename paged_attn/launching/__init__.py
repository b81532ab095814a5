"""From a step to the driver."""
