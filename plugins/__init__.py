"""Where others plug in: the pytest plugin and the jobs that it puts on trial."""
