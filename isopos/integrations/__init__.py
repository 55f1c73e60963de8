"""Schemes in models of other libraries and in files for other runtimes; nothing else imports these modules."""
