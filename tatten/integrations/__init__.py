"""Adapters to other libraries, one module for each library. Each module imports its library."""
