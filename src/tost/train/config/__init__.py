"""Run configuration: schema, reading, validation and writing."""
