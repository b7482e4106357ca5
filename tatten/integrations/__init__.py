"""Adapters to other libraries, one module each: import the one for the library that you have."""
