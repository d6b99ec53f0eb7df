"""Apple's GPUs, through pyobjc's Metal: memory, queues, events, programs of Metal Shading Language."""
