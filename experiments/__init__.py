"""Reproducible experiments: named frozen configs in, rows with provenance out, tables from rows."""
