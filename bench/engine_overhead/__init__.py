"""What capture costs a real SGLang server: one server with capture off and on in turn, beside one without."""
