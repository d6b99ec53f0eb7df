"""How products and attention are cut on CPUs: schedules of contractions, of attention and of rows of packed weights."""
