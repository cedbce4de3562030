"""No models: sqlq's tables are made by migrations of its own, and are none of makemigrations' business.

The module is there because Django sends `post_migrate` only to apps that have one.
"""
