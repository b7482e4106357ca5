"""tatten in other libraries' terms, one module for each; import the module of the library that you have."""
