"""JSON Schema: the document, its keywords and their logic, and the shapes of values."""
