// Package ciliumnode has the parts of Cilium's CiliumNode that eniplane reads
// and writes, with the names and types of Cilium v1.18.6, and the rule that
// every stored version must keep. How objects are read and written does not
// belong here.
//
// +kubebuilder:object:generate=true
// +groupName=cilium.io
// +versionName=v2
package ciliumnode

import (
	_ "embed" // The CRD is part of the program.

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

//go:embed cilium.io_ciliumnodes.yaml
var crd []byte

// CRD returns our CustomResourceDefinition as YAML. It preserves fields that it
// does not know, and must never be applied where Cilium's own exists. The caller
// owns the slice.
func CRD() []byte { return append([]byte(nil), crd...) }

// Kind is the kind of the object.
const Kind = "CiliumNode"

// GVR returns the resource of CiliumNode objects, which are cluster scoped.
func GVR() schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: "cilium.io", Version: "v2", Resource: "ciliumnodes"}
}

// CiliumNode is a node as Cilium's agent and operator share it.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:categories={cilium},scope=Cluster,path=ciliumnodes,singular=ciliumnode,shortName={cn,ciliumn}
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="InternalIP",type=string,JSONPath=`.spec.addresses[?(@.type=="InternalIP")].ip`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type CiliumNode struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	// Spec is what is wanted, and the pool.
	//
	// +kubebuilder:pruning:PreserveUnknownFields
	Spec Spec `json:"spec"`
	// Status is what is.
	//
	// +optional
	// +kubebuilder:pruning:PreserveUnknownFields
	Status Status `json:"status,omitempty"`
}

// Spec is the spec of a CiliumNode.
type Spec struct {
	// InstanceID is the EC2 instance id.
	InstanceID string `json:"instance-id,omitempty"`
	// Addresses are the node's own addresses.
	Addresses []Address `json:"addresses,omitempty"`
	// ENI says which ENIs the node may use.
	ENI ENISpec `json:"eni,omitempty"`
	// IPAM has the watermarks and the pool.
	IPAM IPAMSpec `json:"ipam,omitempty"`
}

// Address is an address of the node itself.
type Address struct {
	// Type is the kind, such as "InternalIP".
	Type string `json:"type,omitempty"`
	// IP is the address.
	IP string `json:"ip,omitempty"`
}

// ENISpec is spec.eni. Its watermarks are obsolete twins of those in IPAMSpec.
//
// +kubebuilder:pruning:PreserveUnknownFields
type ENISpec struct {
	// InstanceID is the obsolete twin of Spec.InstanceID.
	InstanceID string `json:"instance-id,omitempty"`
	// InstanceType is EC2's type, such as "m5.large".
	InstanceType string `json:"instance-type,omitempty"`
	// MinAllocate is obsolete.
	//
	// +kubebuilder:validation:Minimum=0
	MinAllocate int `json:"min-allocate,omitempty"`
	// PreAllocate is obsolete.
	//
	// +kubebuilder:validation:Minimum=0
	PreAllocate int `json:"pre-allocate,omitempty"`
	// MaxAboveWatermark is obsolete.
	//
	// +kubebuilder:validation:Minimum=0
	MaxAboveWatermark int `json:"max-above-watermark,omitempty"`
	// FirstInterfaceIndex is the lowest device index that gives addresses.
	// Absent is not 0.
	//
	// +kubebuilder:validation:Minimum=0
	FirstInterfaceIndex *int `json:"first-interface-index,omitempty"`
	// SecurityGroups are ids of the groups of new ENIs.
	SecurityGroups []string `json:"security-groups,omitempty"`
	// SecurityGroupTags select the groups of new ENIs.
	SecurityGroupTags map[string]string `json:"security-group-tags,omitempty"`
	// SubnetIDs are the subnets of new ENIs.
	SubnetIDs []string `json:"subnet-ids,omitempty"`
	// SubnetTags select the subnets of new ENIs.
	SubnetTags map[string]string `json:"subnet-tags,omitempty"`
	// NodeSubnetID is the subnet of the primary ENI.
	NodeSubnetID string `json:"node-subnet-id,omitempty"`
	// VPCID is the VPC.
	VPCID string `json:"vpc-id,omitempty"`
	// AvailabilityZone is the zone.
	AvailabilityZone string `json:"availability-zone,omitempty"`
	// ExcludeInterfaceTags are tags whose ENIs give no addresses.
	ExcludeInterfaceTags map[string]string `json:"exclude-interface-tags,omitempty"`
	// DeleteOnTermination: absent means true.
	DeleteOnTermination *bool `json:"delete-on-termination,omitempty"`
	// UsePrimaryAddress: absent means false.
	UsePrimaryAddress *bool `json:"use-primary-address,omitempty"`
	// DisablePrefixDelegation: absent means false.
	DisablePrefixDelegation *bool `json:"disable-prefix-delegation,omitempty"`
}

// IPAMSpec is spec.ipam.
//
// +kubebuilder:pruning:PreserveUnknownFields
type IPAMSpec struct {
	// Pool has the addresses that pods may use, by address.
	Pool map[string]Allocation `json:"pool,omitempty"`
	// MinAllocate is a floor on the total.
	//
	// +kubebuilder:validation:Minimum=0
	MinAllocate int `json:"min-allocate,omitempty"`
	// MaxAllocate is a ceiling on the total.
	//
	// +kubebuilder:validation:Minimum=0
	MaxAllocate int `json:"max-allocate,omitempty"`
	// PreAllocate is how many are kept free.
	//
	// +kubebuilder:validation:Minimum=0
	PreAllocate int `json:"pre-allocate,omitempty"`
	// MaxAboveWatermark is the upper slack of one allocation.
	//
	// +kubebuilder:validation:Minimum=0
	MaxAboveWatermark int `json:"max-above-watermark,omitempty"`
	// StaticIPTags select an elastic address.
	StaticIPTags map[string]string `json:"static-ip-tags,omitempty"`
}

// Allocation is one address of a pool, or one in use.
//
// +kubebuilder:pruning:PreserveUnknownFields
type Allocation struct {
	// Owner is who has it: "namespace/pod", "router". Blank in the pool.
	Owner string `json:"owner,omitempty"`
	// Resource is the id of the ENI.
	Resource string `json:"resource,omitempty"`
}

// Status is the status of a CiliumNode.
type Status struct {
	// ENI has the ENIs.
	//
	// +optional
	ENI ENIStatus `json:"eni,omitempty"`
	// IPAM has what is used and released.
	//
	// +optional
	IPAM IPAMStatus `json:"ipam,omitempty"`
}

// ENIStatus is status.eni.
//
// +kubebuilder:pruning:PreserveUnknownFields
type ENIStatus struct {
	// ENIs has the ENIs by id.
	ENIs map[string]ENI `json:"enis,omitempty"`
}

// ENI is one network interface.
//
// +kubebuilder:pruning:PreserveUnknownFields
type ENI struct {
	// ID is EC2's id.
	ID string `json:"id,omitempty"`
	// IP is the primary address.
	IP string `json:"ip,omitempty"`
	// MAC is the MAC address.
	MAC string `json:"mac,omitempty"`
	// AvailabilityZone is the zone.
	AvailabilityZone string `json:"availability-zone,omitempty"`
	// Description is EC2's description.
	Description string `json:"description,omitempty"`
	// Number is the device index; 0 and absent are the same on the wire.
	Number int `json:"number,omitempty"`
	// Subnet is the subnet.
	Subnet Subnet `json:"subnet,omitempty"`
	// VPC is the VPC.
	VPC VPC `json:"vpc,omitempty"`
	// Addresses are those that pods may use, prefixes expanded.
	Addresses []string `json:"addresses,omitempty"`
	// Prefixes are the /28 prefixes.
	Prefixes []string `json:"prefixes,omitempty"`
	// SecurityGroups are ids.
	SecurityGroups []string `json:"security-groups,omitempty"`
	// Tags are EC2's tags.
	Tags map[string]string `json:"tags,omitempty"`
	// PublicIP is the public address, if any.
	PublicIP string `json:"public-ip,omitempty"`
}

// Subnet is the subnet of an ENI.
//
// +kubebuilder:pruning:PreserveUnknownFields
type Subnet struct {
	// ID is EC2's id.
	ID string `json:"id,omitempty"`
	// CIDR is its IPv4 CIDR.
	CIDR string `json:"cidr,omitempty"`
}

// VPC is the VPC of an ENI.
//
// +kubebuilder:pruning:PreserveUnknownFields
type VPC struct {
	// ID is EC2's id.
	ID string `json:"id,omitempty"`
	// PrimaryCIDR is its first IPv4 CIDR.
	PrimaryCIDR string `json:"primary-cidr,omitempty"`
	// CIDRs are the further ones.
	CIDRs []string `json:"cidrs,omitempty"`
}

// IPAMStatus is status.ipam.
//
// +kubebuilder:pruning:PreserveUnknownFields
type IPAMStatus struct {
	// Used has the addresses in use, by address.
	Used map[string]Allocation `json:"used,omitempty"`
	// ReleaseIPs has the handshakes by address: marked-for-release,
	// ready-for-release, do-not-release, released.
	ReleaseIPs map[string]ReleaseState `json:"release-ips,omitempty"`
	// OperatorStatus is what hinders the node.
	//
	// +optional
	OperatorStatus OperatorStatus `json:"operator-status,omitempty"`
	// AssignedStaticIP is the elastic address.
	AssignedStaticIP string `json:"assigned-static-ip,omitempty"`
}

// ReleaseState is the state of the release of one address.
//
// +kubebuilder:validation:Enum=marked-for-release;ready-for-release;do-not-release;released
type ReleaseState string

// The states of a release.
const (
	ReleaseMarked       ReleaseState = "marked-for-release"
	ReleaseReady        ReleaseState = "ready-for-release"
	ReleaseDoNotRelease ReleaseState = "do-not-release"
	ReleaseReleased     ReleaseState = "released"
)

// OperatorStatus is status.ipam.operator-status.
//
// +kubebuilder:pruning:PreserveUnknownFields
type OperatorStatus struct {
	// Error is one line; empty means that nothing hinders the node.
	Error string `json:"error,omitempty"`
}

// CiliumNodeList is a list of nodes.
//
// +kubebuilder:object:root=true
type CiliumNodeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`

	// Items are the nodes.
	Items []CiliumNode `json:"items"`
}
