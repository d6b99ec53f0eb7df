"""What every device shares: machine code in memory, entries, streams, futures, queues and observers."""
