"""The tables that an evaluation writes, and how the parts of one evaluation are joined."""
