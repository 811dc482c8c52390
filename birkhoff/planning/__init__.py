"""One request's captures and edits as a plan, for any engine, and what became of it."""
