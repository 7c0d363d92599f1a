"""Every decision of the operator, as pure functions: no I/O, no clock, no chance."""
