from specdec_hf.cli import interrupt
from specdec_hf.requirements import explain

if __name__ == "__main__":
    with interrupt.in_one_line():
        try:
            from specdec_hf.cli.app import main
        except ImportError as error:
            raise SystemExit(f"error: {explain(error)}") from None
        except ValueError as error:  # two packages give a command one name
            raise SystemExit(f"error: {error}") from None

        main()
