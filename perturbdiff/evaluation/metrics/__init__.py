"""The metrics, each a pure function over arrays, and the catalogue that says what each of them is."""
