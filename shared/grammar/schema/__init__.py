"""JSON Schema: the document, its keywords and their logic, and the shapes that values may have."""
