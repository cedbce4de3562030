"""A small web shop: an order is placed, and its receipt goes out by mail."""
