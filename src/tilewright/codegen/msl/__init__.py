"""Apple's GPUs: thread-stage IR -> Metal Shading Language."""
