"""The console command `lmtools`, a subcommand a file; imports everything below."""
