"""Arrays of packed blocks: their elements become arithmetic on bytes, and loops over them become loops over blocks."""
