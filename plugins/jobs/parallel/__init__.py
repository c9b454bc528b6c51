"""One model on every topology: each module here is one kind of parallelism, in a few lines."""
