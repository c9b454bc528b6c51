"""Starting ranks and owning their processes: launchers, the custodian, what a rank is told."""
