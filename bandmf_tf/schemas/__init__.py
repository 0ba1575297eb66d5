"""JSON Schemas of the files that this library writes."""
