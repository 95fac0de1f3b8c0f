"""Rows of datasets: reading, checking, mapping and ordering them."""
