"""What carries plans out: the work queue, the reconciler, and the process around them."""
