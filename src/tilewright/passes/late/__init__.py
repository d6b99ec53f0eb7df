"""Thread stage to thread stage: functions and conversions become arithmetic, accesses and indices get their final form."""
