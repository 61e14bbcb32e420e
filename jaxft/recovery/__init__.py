"""What is done about a fault; the process that outlives the worker."""
