"""From evaluated runs to one page: tables, figures and sentences."""
