"""Settings all tests share."""
