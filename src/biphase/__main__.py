from biphase.cli.app import main

main()
