"""Programs of this checkout: thin command lines over the library bandmf_tf."""
