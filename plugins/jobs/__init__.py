"""Training programs that can be put on trial; see `seatrial.plugins.jobs.protocol`."""
