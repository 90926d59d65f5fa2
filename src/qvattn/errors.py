"""The one error a user causes and can mend; the command line prints it and exits with 2."""


class UserError(ValueError):
    """Bad input or an impossible request. The message names the field, its value and what is allowed."""
