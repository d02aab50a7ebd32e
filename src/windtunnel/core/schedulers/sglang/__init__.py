"""SGLang's scheduler: ``scheduler`` decides its rounds; the others are its parts."""
