"""What `import tilewright` offers beyond kernels and arrays: primitives, profiles, regions, debugging, export."""
