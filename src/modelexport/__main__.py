"""`python -m modelexport`: the command line."""

from modelexport.cli.main import main

if __name__ == "__main__":
    main(prog_name="modelexport")
