"""The tables, the views and the migrations that make them."""
