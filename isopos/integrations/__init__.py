"""isopos in other libraries' models, a package a library; nothing else imports them."""
