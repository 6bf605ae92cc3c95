"""`posttrain board`: a local web page that reads run directories."""
