module github.com/eniplane/eniplane/deploy/local/ec2sim/internal/limits/gen

go 1.26.6

require github.com/aws/amazon-vpc-resource-controller-k8s v1.8.2
