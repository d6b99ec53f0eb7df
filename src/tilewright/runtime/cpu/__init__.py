"""The CPU: loaded programs, the thread pool, recorded graphs."""
