"""Files of models: GGUF, and folders of safetensors. Both open as a `ModelFile`."""
