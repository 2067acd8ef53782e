module github.com/eniplane/eniplane/deploy/local/ec2sim

go 1.26.0
