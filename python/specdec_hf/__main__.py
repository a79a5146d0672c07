from specdec_hf.cli.app import main

if __name__ == "__main__":
    main()
